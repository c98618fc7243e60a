"""The operations, a folder each: contract, checks, reference and implementations."""
