"""One folder an operation: contract, reference and every implementation, side by side."""
