"""Do two runs have the same bits, and if not, where do they first differ?

Read `verification.py`.
"""
