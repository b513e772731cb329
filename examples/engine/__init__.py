"""A small inference engine on torch whose KV pool is indexed by `req_to_token` alone."""
