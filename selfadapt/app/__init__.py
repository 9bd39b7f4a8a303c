"""The web app: upload an image, choose methods, compare before and after.

    limits    all limits: on visitors, requests, uploads, files and time
    uploads   validation and decoding of uploaded images
    networks  the networks to choose from
    requests  validation of methods and settings
    run       running methods on an image
    viewer    results as JSON for the viewer; charts: as tables and curves; masks: as a ZIP file
    page      the Gradio page; web/: its style and script
    gate      the filter in front of Gradio: which requests are passed on
    server    the server and its settings

Only page and server import Gradio.
"""
