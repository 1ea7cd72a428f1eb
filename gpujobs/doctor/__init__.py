"""`gpujobs doctor`."""
