"""Tests, and what they share in helpers/ and zoo/; imported from the root of the checkout."""
