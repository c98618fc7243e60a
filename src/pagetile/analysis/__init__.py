"""What attention costs, by exact counting: bytes, roofs, memory plans, and pictures of them."""
