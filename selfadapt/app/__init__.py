"""The server: a page to compare methods on an image, and an interface for programs.

    limits    all limits: on visitors, requests, uploads, files and time
    uploads   validation and decoding of uploaded images
    networks  the networks to choose from
    requests  validation of methods and settings
    jobs      the queue of images
    run       running methods on an image
    viewer    results as JSON for the viewer; charts: as tables and curves; masks: as a ZIP file
    page      the Gradio page; web/: its style and script
    gate      the filter in front of Gradio: which requests are passed on
    service   the interface for programs; answers: what it sends; description: OpenAPI
    asgi      pieces of both interfaces
    server    the server and its settings

Only page and server import Gradio, only service and server FastAPI.
"""
