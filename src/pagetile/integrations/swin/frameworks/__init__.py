"""One module for each framework: the classes that can be patched, and their replacements.

They import their frameworks, so only ``patch`` imports them, and only for frameworks in use.
"""
