"""The web app: drop an image, choose methods, see before and after.

    uploads   what may come in, and images out of it
    networks  those to choose from
    requests  what may be asked for, checked
    run       what methods give for an image
    viewer    results as the page's viewer takes them; charts: as tables and curves; masks: as files
    page      what one sees, made of Gradio's components; web/: its style and script
    gate      which requests are let through at all
    server    settings, and the server itself

All but page and server know nothing of Gradio.
"""
