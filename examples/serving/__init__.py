"""A small continuous-batching engine for Hugging Face decoders, with cuteflash's attention over a paged K/V cache."""
