"""One file for each framework: which of its classes we stand in for, and how.

They import their frameworks, so only ``patch`` imports them, and only those in use.
"""
