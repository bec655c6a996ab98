"""The sweep: which traits run a problem fastest on a GPU, and why the others lost."""
