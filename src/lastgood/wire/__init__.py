"""Records and frames on the wire, and the layout of ring all-reduce."""
