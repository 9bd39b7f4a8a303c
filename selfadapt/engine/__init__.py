"""How a network is run for one image.

copying.py   a private copy of the caller's network, which is never touched
network.py   the copy for one image: class scores, gradients, steps
"""
