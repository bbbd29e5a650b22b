"""The service inside programs of others: where all parts are put together for them."""
