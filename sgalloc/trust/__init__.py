"""What lets a user believe the allocator, and send a report that reproduces."""
