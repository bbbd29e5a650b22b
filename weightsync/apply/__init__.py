"""From staged bytes to live parameters: commit, rollback and checks, on torch tensors."""
