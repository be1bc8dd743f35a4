"""Files fetched once per node, checked by hash before use, and unpacked within limits."""
