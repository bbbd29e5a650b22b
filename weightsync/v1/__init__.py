"""The generated stubs of the contract in `protos/weightsync/v1`: regenerate them with `make protos`."""
