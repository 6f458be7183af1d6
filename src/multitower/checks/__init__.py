"""Is this function safe to run data parallel, and which line says no?

Reads programs and runs nothing. Read `row_flow.py` first.
"""
