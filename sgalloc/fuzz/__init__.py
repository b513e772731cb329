"""Random walks of an allocator, held against a naive one: what ``sgalloc fuzz`` runs."""
