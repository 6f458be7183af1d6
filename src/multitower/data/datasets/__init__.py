"""Data sets of images and text: read from the files of their authors, downloaded when asked, or made up.

Knows NumPy only, nothing of devices, towers or steps. Read `images.py` first.
"""
