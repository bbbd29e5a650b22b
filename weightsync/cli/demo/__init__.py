"""`weightsync demo`: a pair of models is trained and pushed into a worker that generates."""
