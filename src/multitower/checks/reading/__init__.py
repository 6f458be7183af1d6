"""What a program does with rows: where they go, are added up, counted, sorted or brought together.

Read `flow.py` first, which says what is known of a value, then `row_flow.py`.
"""
