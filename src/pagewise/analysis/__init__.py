"""What a cache costs and what lies in it: memory plans and pictures, by exact counting."""
