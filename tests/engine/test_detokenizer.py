import functools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from pagetile.engine import window_decoder
from pagetile.engine.detokenizer import Detokenizer
from pagetile.engine.sampling_params import SamplingParams
from pagetile.engine.text_decoder import TextDecoder

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 1,024 tokens -- isn't it?",
    "页面与块:注意力机制 は キャッシュ を 읽습니다 สวัสดี नमस्ते",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 e\u0301 n\u0303 \u0627\u0644\u0633\u0644\u0627\u0645 \U0001d518 🇩🇪",
]
LETTERS = "abcdefghijklmnopqrstuvwxyzTI.,'1024"


@functools.cache
def byte_level():
    """As GPT-2 and Llama 3: every token is bytes, and may end within a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@functools.cache
def byte_fallback():
    """As Llama 2: letters and words, bytes for the rest, the first space stripped."""
    tokens = ["<unk>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "a"), ("▁", "▁")]
    tokens += [a + b for a, b in merges]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@functools.cache
def word_pieces():
    """As BERT: the decoder puts the spaces between words."""
    words = ["[UNK]", "<eos>", *LETTERS, *("##" + letter for letter in LETTERS), "the", "##ing"]
    model = models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


TOKENIZERS = {"bytes": byte_level, "fallback": byte_fallback, "words": word_pieces}
texts = st.one_of(
    st.text(max_size=60),
    st.lists(st.sampled_from([*"".join(CORPUS), "the ", " ", "  a"]), max_size=60).map("".join),
)


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def decode(tokenizer, token_ids, skip_special_tokens=True):
    return tokenizer.decode(
        token_ids,
        skip_special_tokens=skip_special_tokens,
        clean_up_tokenization_spaces=False,
    )


def make(tokenizer, params):
    return Detokenizer(None if tokenizer is None else TextDecoder(tokenizer), params)


def stream(detokenizer, token_ids):
    """The pieces, one per token and one for the flush."""
    return [*(detokenizer.append([token_id]) for token_id in token_ids), detokenizer.flush()]


def cut_at_stop(text, stops, include=False):
    """Read character by character: the text as it should end, and the stop string that ended it."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


# --- characters ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=texts, skip=st.booleans(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_pieces_join_to_the_decoded_text(kind, text, skip, data):
    tokenizer = TOKENIZERS[kind]()
    token_ids = encode(tokenizer, text)
    for at in data.draw(st.lists(st.integers(0, len(token_ids)), max_size=4)):
        token_ids.insert(at, tokenizer.eos_token_id)
    detokenizer = make(tokenizer, SamplingParams(skip_special_tokens=skip))
    pieces = stream(detokenizer, token_ids)
    expected = decode(tokenizer, token_ids, skip)
    if kind == "fallback" and "\ufffd" in expected:
        # Their number may differ; nothing may appear that no tokenizer would have spelt.
        assert {*detokenizer.text} <= {*expected, *text, "\ufffd"}
    else:
        assert "".join(pieces) == expected
    assert detokenizer.text == "".join(pieces)
    assert detokenizer.num_tokens == len(token_ids)


@given(st.lists(st.integers(0, 399), max_size=120))
@settings(max_examples=100, deadline=None)
def test_any_byte_level_tokens_join_to_the_decoded_text(token_ids):
    detokenizer = make(byte_level(), SamplingParams())
    assert "".join(stream(detokenizer, token_ids)) == decode(byte_level(), token_ids)


# Whole and broken characters in pieces: 块, 😀, é, U+FFFD, a surrogate, beyond the last plane.
PARTS = [b"a", b" ", b"\xe5", b"\x9d\x97", b"\x97\xe5", b"\xf0", b"\x9f", b"\xf0\x9f\x98"]
PARTS += [
    b"\x98\x80\xf0",
    b"\xc3",
    b"\xa9",
    b"\xef\xbf",
    b"\xbd",
    b"\xed\xa0",
    b"\xf4\x90",
    b"\xff",
    b"",
]


class Parts:
    """Token ``i`` is ``parts[i]``, some bytes."""

    def __init__(self, parts):
        self.parts = parts

    def decode(self, token_ids, **options):
        return b"".join(self.parts[i] for i in token_ids).decode(errors="replace")


@given(st.lists(st.sampled_from(PARTS), max_size=120))
@settings(max_examples=150, deadline=None)
def test_any_bytes_cut_anywhere_join_to_what_they_spell(parts):
    pieces = stream(make(Parts(parts), SamplingParams()), range(len(parts)))
    assert "".join(pieces) == b"".join(parts).decode(errors="replace")


@pytest.mark.parametrize("spelt", ["块块".encode(), b"\xf0\x9f\x98" * 3, b"\xff" * 9])
def test_where_the_window_is_cut_does_not_matter(spelt):
    for num_before in range(2 * window_decoder.WINDOW):
        letters = [b"a"] * num_before
        parts = [*letters, *(bytes([byte]) for byte in spelt), *letters]
        pieces = stream(make(Parts(parts), SamplingParams()), range(len(parts)))
        assert "".join(pieces) == b"".join(parts).decode(errors="replace")


def test_where_the_window_is_cut_does_not_matter_to_byte_fallback():
    for num_before in range(2 * window_decoder.WINDOW):
        token_ids = encode(byte_fallback(), "a" * num_before + "块块😀😀a块 a")
        detokenizer = make(byte_fallback(), SamplingParams())
        assert "".join(stream(detokenizer, token_ids)) == decode(byte_fallback(), token_ids)


@pytest.mark.parametrize("kind", ["bytes", "fallback"])
@given(text=texts.filter(lambda text: "\ufffd" not in text))
@settings(max_examples=60, deadline=None)
def test_a_character_appears_when_its_last_byte_does_and_not_before(kind, text):
    tokenizer = TOKENIZERS[kind]()
    token_ids = encode(tokenizer, text)
    detokenizer = make(tokenizer, SamplingParams())
    whole = decode(tokenizer, token_ids)
    for n, token_id in enumerate(token_ids, start=1):
        detokenizer.append([token_id])
        so_far = decode(tokenizer, token_ids[:n])
        # Byte fallback blanks whole characters together with a broken one: compare with the end.
        shown = so_far.rstrip("\ufffd") if kind == "bytes" else detokenizer.text
        assert detokenizer.text == shown
        assert whole.startswith(detokenizer.text)
        if "\ufffd" not in so_far:
            assert detokenizer.text == so_far


@given(text=texts, stops=st.lists(st.text(min_size=1, max_size=3), max_size=2), data=st.data())
@settings(max_examples=60, deadline=None)
def test_tokens_at_once_or_one_by_one_give_the_same(text, stops, data):
    token_ids = encode(byte_level(), text)
    params = SamplingParams(stop=stops)
    one_by_one, in_groups = make(byte_level(), params), make(byte_level(), params)
    rest = list(token_ids)
    while rest:
        size = data.draw(st.integers(1, 9))
        pieces = [one_by_one.append([token_id]) for token_id in rest[:size]]
        assert in_groups.append(rest[:size]) == "".join(pieces)
        rest = rest[size:]
    assert in_groups.flush() == one_by_one.flush()
    assert in_groups.num_tokens == one_by_one.num_tokens


def test_spaces_before_punctuation_are_not_cleaned_up():
    tokenizer = word_pieces()
    token_ids = [tokenizer.convert_tokens_to_ids(word) for word in ("the", "'", "s", ",", ".")]
    assert "".join(stream(make(tokenizer, SamplingParams()), token_ids)) == "the ' s , ."


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=texts.filter(lambda text: "\ufffd" not in text), data=st.data())
@settings(max_examples=200, deadline=None)
def test_text_after_a_prompt_continues_its_text(kind, text, data):
    """A first word keeps the space before it."""
    tokenizer = TOKENIZERS[kind]()
    token_ids = encode(tokenizer, text)
    at = data.draw(st.integers(0, len(token_ids)))
    prompt, new = token_ids[:at], token_ids[at:]
    before = decode(tokenizer, prompt)
    if "\ufffd" in before[-3:]:
        return  # the prompt ends within a character
    decoder = TextDecoder(tokenizer)
    detokenizer = Detokenizer(decoder, SamplingParams(), prompt)
    assert before + "".join(stream(detokenizer, new)) == decode(tokenizer, token_ids)
    assert before + decoder.text_after(prompt, new, True) == decode(tokenizer, token_ids)


def test_text_after_a_prompt_does_not_begin_within_one_of_its_characters():
    """The ten tokens before the last are the ends of three characters, all in one run of bytes."""
    tokenizer = byte_fallback()
    token_ids = encode(tokenizer, "\x80\x803\x80𐀀3")
    decoder, prompt, new = TextDecoder(tokenizer), token_ids[:-1], token_ids[-1:]
    assert "".join(stream(Detokenizer(decoder, SamplingParams(), prompt), new)) == "3"
    assert decoder.text_after(prompt, new, True) == "3"


def test_text_after_a_prompt_that_ends_within_a_character_is_its_own():
    tokenizer = byte_fallback()
    token_ids = encode(tokenizer, "the😀 the")
    for at in range(2, 5):
        decoder, new = TextDecoder(tokenizer), token_ids[at:]
        detokenizer = Detokenizer(decoder, SamplingParams(), token_ids[:at])
        assert "".join(stream(detokenizer, new)) == decode(tokenizer, new)
        assert decoder.text_after(token_ids[:at], new, True) == decode(tokenizer, new)


# --- stop strings ----------------------------------------------------------------------------

short = st.text(alphabet="abcé😀", max_size=40)
stop_lists = st.lists(st.text(alphabet="abcé😀", min_size=1, max_size=5), min_size=1, max_size=4)


@given(words=st.lists(short.map(lambda text: text[:6])), stops=stop_lists, include=st.booleans())
@example(words=["xab", "cab"], stops=["bc", "abc"], include=False)
@settings(max_examples=200, deadline=None)
def test_text_ends_at_the_first_complete_stop_string(words, stops, include):
    params = SamplingParams(stop=stops, include_stop_str_in_output=include)
    detokenizer = make(Parts([word.encode() for word in words]), params)
    pieces = stream(detokenizer, range(len(words)))
    expected, reason = cut_at_stop("".join(words), stops, include)
    assert "".join(pieces) == detokenizer.text == expected
    assert detokenizer.stop_reason == reason


@given(text=short, stops=stop_lists)
@settings(max_examples=200, deadline=None)
def test_exactly_what_may_begin_a_stop_string_is_held_back(text, stops):
    token_ids = encode(byte_level(), text)
    detokenizer = make(byte_level(), SamplingParams(stop=stops))
    for n, token_id in enumerate(token_ids, start=1):
        detokenizer.append([token_id])
        if detokenizer.stop_reason is not None:
            break
        so_far = decode(byte_level(), token_ids[:n]).rstrip("\ufffd")
        tails = (so_far[i:] for i in range(len(so_far)))
        held = next((t for t in tails if any(stop.startswith(t) for stop in stops)), "")
        assert detokenizer.text + held == so_far


def test_a_stop_string_is_found_in_the_middle_of_a_token():
    tokenizer = byte_level()
    token_id = tokenizer.convert_tokens_to_ids("Ġtoken")
    detokenizer = make(tokenizer, SamplingParams(stop="ke"))
    assert detokenizer.append([token_id, token_id]) == " to"
    assert (detokenizer.stop_reason, detokenizer.num_tokens) == ("ke", 1)
    assert detokenizer.append([token_id]) == detokenizer.flush() == ""


def test_held_back_text_is_given_when_it_turns_out_harmless():
    detokenizer = make(byte_level(), SamplingParams(stop="abcd"))
    pieces = [detokenizer.append(encode(byte_level(), letter)) for letter in "xabcabce"]
    assert pieces == ["x", "", "", "", "abc", "", "", "abce"]


def test_flush_gives_what_never_became_a_stop_string():
    detokenizer = make(byte_level(), SamplingParams(stop="abcd"))
    assert detokenizer.append(encode(byte_level(), "xabc")) == "x"
    assert detokenizer.flush() == "abc"
    assert detokenizer.flush() == ""
    assert detokenizer.stop_reason is None


def test_flush_gives_an_unfinished_character():
    token_ids = encode(byte_level(), "a🦖")
    detokenizer = make(byte_level(), SamplingParams())
    assert detokenizer.append(token_ids[:-1]) == "a"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, ""), (2, ""), (3, "ab"), (5, "abab")])
def test_a_stop_string_complete_before_min_tokens_is_text(min_tokens, expected):
    params = SamplingParams(stop=["ab", "xababz"], min_tokens=min_tokens)
    detokenizer = make(byte_level(), params)
    stream(detokenizer, [encode(byte_level(), letter)[0] for letter in "abababx"])
    assert detokenizer.text == expected


def test_an_early_stop_string_is_not_held_back():
    detokenizer = make(byte_level(), SamplingParams(stop="ab", min_tokens=9))
    pieces = stream(detokenizer, [encode(byte_level(), letter)[0] for letter in "abx"])
    assert pieces == ["", "ab", "x", ""]


def test_an_early_stop_string_is_not_found_later_in_what_was_held_back():
    params = SamplingParams(stop=["b", "abcd"], min_tokens=3)
    detokenizer = make(byte_level(), params)
    stream(detokenizer, [encode(byte_level(), letter)[0] for letter in "abcxb"])
    assert detokenizer.text == "abcx"


# --- no text, and cost -----------------------------------------------------------------------


def test_without_tokenizer_or_with_detokenize_off_there_is_no_text():
    for tokenizer, detokenize in ((None, True), (byte_level(), False)):
        detokenizer = make(tokenizer, SamplingParams(detokenize=detokenize))
        assert stream(detokenizer, [5, 6, 10**9]) == ["", "", "", ""]
        assert (detokenizer.text, detokenizer.stop_reason) == ("", None)


class Counted:
    """Passes calls on to a tokenizer and counts the tokens that it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.num_calls, self.longest = tokenizer, 0, 0

    def decode(self, token_ids, **options):
        self.num_calls += 1
        self.longest = max(self.longest, len(token_ids))
        return self.tokenizer.decode(token_ids, **options)


def straddling(num_tokens):
    """Tokens of three bytes, each beginning and ending inside a character."""
    spelt = ("x" + "块" * (num_tokens + 1)).encode()[2:]

    class Straddling:
        def decode(self, token_ids, **options):
            chunks = [spelt[3 * i : 3 * i + 3] for i in token_ids]
            return b"".join(chunks).decode(errors="replace")

    return Straddling(), list(range(num_tokens))


def same_token(tokenizer, token):
    return tokenizer, [tokenizer.convert_tokens_to_ids(token)] * 300


def specials_within(tokenizer, character):
    first, *rest = encode(tokenizer, character)
    return tokenizer, [first, *[tokenizer.eos_token_id] * 300, *rest]


CASES = {
    "text": lambda: (byte_level(), encode(byte_level(), " ".join(CORPUS * 4))),
    "fallback": lambda: (byte_fallback(), encode(byte_fallback(), " ".join(CORPUS * 2))),
    "specials": lambda: same_token(byte_level(), "<eos>"),
    "specials in a character": lambda: specials_within(byte_level(), "块"),
    "broken": lambda: same_token(byte_level(), "ÿ"),
    "broken fallback": lambda: same_token(byte_fallback(), "<0xFF>"),
    "straddling": lambda: straddling(300),
}


@pytest.mark.parametrize("case", CASES)
def test_a_token_costs_the_same_however_long_the_text(case):
    tokenizer, token_ids = CASES[case]()
    counted = Counted(tokenizer)
    detokenizer = make(counted, SamplingParams())
    assert "".join(stream(detokenizer, token_ids)) == decode(tokenizer, token_ids)
    assert len(token_ids) >= 250
    assert counted.longest <= window_decoder.WINDOW
    # One decode a token; a second for a special token or one that begins a character.
    assert counted.num_calls <= (1.1 if case == "text" else 2) * len(token_ids)


def test_words_keep_their_space_after_many_special_tokens():
    tokenizer = byte_fallback()
    words = encode(tokenizer, "the the")
    token_ids = [words[0], *[tokenizer.eos_token_id] * 100, words[1]]
    assert "".join(stream(make(tokenizer, SamplingParams()), token_ids)) == "the the"


@given(st.lists(st.sampled_from(["a", "é", "日", "😀", " ", "\n"]), max_size=60).map("".join))
def test_a_tokenizer_that_ignores_parts_of_characters(text):
    tokenizer = ByT5Tokenizer()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = make(tokenizer, SamplingParams())
    assert "".join(stream(detokenizer, token_ids)) == text
