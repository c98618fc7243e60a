"""Code that two or more operations share: the attention state, and tile helpers by backend."""
