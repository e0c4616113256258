"""Rounds of peers that meet in a bucket: a layer above runs, each of which trains alone."""
