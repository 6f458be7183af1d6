"""What more devices give: measured in turns, fitted, drawn, put in words.

Read `measure.py` first.
"""
