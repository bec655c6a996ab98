"""Speed of attention against its peers: same inputs, one process, interleaved rounds; outputs are checked first."""
