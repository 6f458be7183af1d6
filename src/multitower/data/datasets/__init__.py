"""Data sets of images and text: read from files, downloaded on request, or synthetic.

They need only NumPy, and nothing of devices, towers or steps. Read `images.py` and `text.py` first.
"""
