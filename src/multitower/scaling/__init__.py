"""How a recipe scales with devices: measured in turns, fitted, drawn, and put in words.

Read `measure.py` first.
"""
