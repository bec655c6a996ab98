"""Functions with the names, arguments, order and results of other libraries, one module for each of theirs.

    cuteflash.compat.flash_attn            flash_attn, FlashAttention-2
    cuteflash.compat.bert_padding          flash_attn.bert_padding
    cuteflash.compat.flash_attn_interface  flash_attn_interface, FlashAttention-3
    cuteflash.compat.flash_mla             flash_mla, FlashMLA

Each calls the public functions of cuteflash. What those cannot do yet raises NotImplementedError, which names the
argument, before anything runs.
"""
