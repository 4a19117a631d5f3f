"""The built-in byte-level vocabulary with ChatML special tokens. Does not import transformers."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

BYTES_VOCAB_SIZE = 259
"""256 bytes (the token id of a byte is its value), then end of text, turn start, turn end."""

# Bytes that byte-level BPE represents by the character with the same code point.
_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


def byte_library_tokenizer() -> Tokenizer:
    """Build the byte-level tokenizer with ChatML special tokens, as a `tokenizers.Tokenizer`."""
    unprinted = (byte for byte in range(256) if byte not in _PRINTED)
    spelled = {byte: chr(byte) for byte in _PRINTED}
    # GPT-2's bytes_to_unicode: the other bytes take the code points from 256 on.
    spelled.update((byte, chr(256 + index)) for index, byte in enumerate(unprinted))
    vocabulary = {character: byte for byte, character in spelled.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token in (END_OF_TEXT, TURN_START, TURN_END)]
    )
    return tokenizer
