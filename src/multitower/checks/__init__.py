"""Is this function safe to run data parallel, and which line says no?

Reads programs and runs nothing. Read `first_look.py` first; `reading/` follows the rows.
"""
