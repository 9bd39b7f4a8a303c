"""The web app: drop an image, choose methods, see before and after.

    uploads   what may come in, and images out of it
    wishes    what may be asked for, checked
    run       networks, and what their methods give for an image
    pictures  results as pictures; charts: as tables and curves; masks: as files
    page      what one sees, made of Gradio's components; slots: of a result
    gate      which requests are let through at all
    server    settings, and the server itself

All but page, slots and server know nothing of Gradio.
"""
