"""The engine: requests in, tokens out, over the paged cache."""
