"""Clusters that were submitted: what the command line and the cluster classes share."""
