"""Data sets of images and text: read from files, downloaded when asked, or made up.

Knows NumPy only, nothing of devices, towers or steps. Read `images.py` and `text.py` first.
"""
