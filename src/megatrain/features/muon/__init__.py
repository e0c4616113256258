"""Muon: the matrices of a layer are orthogonalized on the device before its update."""
