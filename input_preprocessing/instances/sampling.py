"""Training instances from tokenised documents: sentence pairs, masks and their order, compiled.

Draws from one Mersenne Twister in exactly the order of the reference (create_pretraining_data.py of
google-research/bert as amended by MLCommons), so the instances are bit-identical. A pair is two
contiguous runs of tokens (whole segments of a document, then truncated at both ends); only its
bounds are kept until the order is known. Without next-sentence prediction a document is cut into
runs of a full sequence, and the second run is empty.
"""

from pathlib import Path

import numpy as np

from bert.data.compiled import compiled, is_first
from bert.data.format import write_records
from bert.data.records import Array, Metadata, Records, offsets_of
from input_preprocessing.instances import mersenne
from input_preprocessing.instances.options import SamplingConfig, sampling_digest
from input_preprocessing.stage.reading import read_text
from input_preprocessing.text.tokenization import TokenizedText, grown, tokenize
from input_preprocessing.text.vocabulary import Vocabulary

# The 53 bits of random() are below these iff it is below 0.5, 0.8.
_HALF, _FOUR_FIFTHS = 1 << 52, int(0.8 * 2**53)


def instances_of(
    source: Path, words: Vocabulary, config: SamplingConfig
) -> tuple[Records, Metadata]:
    """Instances of a text file and their metadata. Raises DataError if it cannot be read."""
    data, md5 = read_text(source, "--input-file")
    text = tokenize(data, words, config.do_lower_case)
    # Not needed beside the instances, several times its size: memory limits the workers.
    del data
    return make_instances(text, words, config), metadata_of(source, md5, words, config)


def metadata_of(
    source: Path, md5: str, words: Vocabulary, config: SamplingConfig
) -> Metadata:
    """What the instances of a text say of themselves, without digests."""
    return Metadata(
        max_seq_length=config.max_seq_length,
        vocab_md5=words.md5,
        random_seed=config.random_seed,
        dupe_factor=config.dupe_factor,
        source=((source.name, md5), ("sampling", sampling_digest(config))),
    )


def write_instances(
    source: Path, target: Path, words: Vocabulary, config: SamplingConfig
) -> tuple[int, Metadata]:
    """Writes the instances of a text file; returns their number and metadata."""
    records, metadata = instances_of(source, words, config)
    return records.num_sequences, write_records(target, records, metadata)


def compile_first(words: Vocabulary, config: SamplingConfig) -> None:
    """Compiles the instance maker if this version never ran, before all workers would do so at
    once.
    """
    if is_first(sample):
        make_instances(
            tokenize(b"A text, a caf\xc3\xa9.\n\nAnother.\n", words), words, config
        )


def make_instances(
    text: TokenizedText, vocabulary: Vocabulary, config: SamplingConfig
) -> Records:
    """All instances of a text, in the reference's order; none if the text has no tokens."""
    most, share = config.max_predictions_per_seq, config.masked_lm_prob
    segment_offsets, document_offsets = text.segment_offsets, text.document_offsets
    if not config.nsp:
        # [CLS] and one [SEP] leave this many tokens to a run.
        segment_offsets, document_offsets = _runs(
            segment_offsets[document_offsets], config.max_seq_length - 2
        )
    # Masked tokens by length n of a sequence, [CLS] and [SEP] included. Made in Python, whose
    # round() the reference uses: halves go to the even neighbour.
    num_predictions = np.array(
        [min(most, max(1, round(n * share))) for n in range(config.max_seq_length + 1)]
    )
    # In this order the compiled functions take them: special[0], [1] and [2].
    special = np.array(
        [vocabulary.ids[token] for token in ("[CLS]", "[SEP]", "[MASK]")],
        dtype=text.tokens.dtype,
    )
    # An id of 15 bits above a position of 16 fits int32; ids of a larger vocabulary need int64.
    # Holds a position and an id.
    mask_type = np.empty(0, dtype=np.int32 if text.tokens.itemsize == 2 else np.int64)
    state = mersenne.initial_state(config.random_seed)
    drawn = sample(
        state,
        text.tokens,
        segment_offsets,
        document_offsets,
        special,
        len(vocabulary),
        mask_type,
        config.max_seq_length,
        config.short_seq_prob,
        config.dupe_factor,
        num_predictions,
        config.nsp,
    )
    # The reference's last draw, over the instances of all passes; here their numbers are shuffled.
    order = np.arange(len(drawn[0]))
    mersenne.shuffle(state, order)
    return _records_of(text.tokens, special, drawn, order, config.nsp)


def _records_of(
    tokens: Array,
    special: Array,
    drawn: tuple[Array, ...],
    order: Array,
    nsp: bool,
) -> Records:
    """The instances in this order. drawn: as `sample` returns them."""
    pairs, masked_offsets, _ = drawn
    chosen = pairs[order]
    lengths_a = chosen[:, 1] - chosen[:, 0]
    # With [CLS] and the [SEP] after each segment.
    lengths = lengths_a + chosen[:, 3] - chosen[:, 2] + (3 if nsp else 2)
    sequence_offsets = np.concatenate([[0], np.cumsum(lengths)])
    new_masked_offsets = np.concatenate(
        [[0], np.cumsum(np.diff(masked_offsets)[order])]
    )
    input_ids = np.empty(sequence_offsets[-1], dtype=tokens.dtype)
    positions = np.empty(new_masked_offsets[-1], dtype=np.int16)
    labels = np.empty(new_masked_offsets[-1], dtype=tokens.dtype)
    made = input_ids, positions, labels
    _write_sequences(tokens, special, drawn, order, made)
    # Segment B starts after [CLS], segment A and its [SEP].
    return Records(
        input_ids=input_ids,
        sequence_offsets=sequence_offsets,
        segment_b_start=(lengths_a + 2).astype(np.int16),
        masked_lm_positions=positions,
        masked_lm_ids=labels,
        masked_lm_offsets=new_masked_offsets,
        next_sentence_labels=chosen[:, 4].astype(np.int8),
    )


def _runs(ends: Array, length: int) -> tuple[Array, Array]:
    """Offsets of runs of `length` tokens (the last of a document may be shorter), and of documents
    in runs.

    ends: start of each document, and end of the last one.
    """
    counts = -(-np.diff(ends) // length)
    documents = offsets_of(counts)
    within = np.arange(documents[-1]) - np.repeat(documents[:-1], counts)
    return np.append(
        np.repeat(ends[:-1], counts) + length * within, ends[-1]
    ), documents


@compiled
def _write_sequences(tokens, special, drawn, order, made):  # type: ignore[no-untyped-def]
    pairs, masked_offsets, masked = drawn
    input_ids, positions, labels = made
    at = 0
    masked_at = 0
    for i in order:
        start = at
        input_ids[at] = special[0]
        at += 1
        for side in range(2):
            begin = pairs[i, 2 * side]
            length = pairs[i, 2 * side + 1] - begin
            # Without next-sentence prediction there is one segment, and no second [SEP].
            if side == 1 and length == 0:
                break
            input_ids[at : at + length] = tokens[begin : begin + length]
            at += length
            input_ids[at] = special[1]
            at += 1
        for j in range(masked_offsets[i], masked_offsets[i + 1]):
            position = masked[j] & 0xFFFF
            positions[masked_at] = position
            # The label is the token that the mask then replaces.
            labels[masked_at] = input_ids[start + position]
            input_ids[start + position] = masked[j] >> 16
            masked_at += 1


@compiled
def _truncate(state, pair, max_num_tokens):  # type: ignore[no-untyped-def]
    """Cuts the longer run, at its front or its end, until both fit."""
    length_a = pair[1] - pair[0]
    length_b = pair[3] - pair[2]
    at = np.int64(state[mersenne.INDEX])
    while length_a + length_b > max_num_tokens:
        if at > mersenne.ENOUGH:
            at = mersenne.refill(state, at)
        bits, at = mersenne.next_bits(state, at)
        front = np.int64(bits < _HALF)  # a number instead of an unpredictable branch
        # Of two equal runs the reference cuts B.
        longer_a = np.int64(length_a > length_b)
        side = 2 - 2 * longer_a
        pair[side] += front
        pair[side + 1] -= 1 - front
        length_a -= longer_a
        length_b -= 1 - longer_a
    state[mersenne.INDEX] = np.uint32(at)


@compiled
def _mask(  # type: ignore[no-untyped-def]
    state, tokens, pair, mask, vocabulary_size, count, scratch, masked, end
):
    """Masks at most `count` positions; appends position + new id * 2^16 in order of positions,
    returns the new end.

    `masked` needs space for one entry per token: unmasked ones are written, too, and then
    overwritten. scratch: three arrays with an entry for each position of a sequence.
    """
    candidates, partners, replaced = scratch
    length_a = pair[1] - pair[0]
    # The text holds neither [CLS] nor [SEP]: the tokenizer splits them.
    num_candidates = length_a + pair[3] - pair[2]
    # All positions but those of [CLS] (0), the first [SEP] (length_a + 1) and the last one.
    for i in range(length_a):
        candidates[i] = i + 1
    for i in range(length_a, num_candidates):
        candidates[i] = i + 2
    mersenne.shuffle_with(state, candidates[:num_candidates], partners)
    replaced[: num_candidates + 2] = -1
    at = np.int64(state[mersenne.INDEX])
    for i in range(min(count, num_candidates)):
        position = candidates[i]
        new = mask
        if at > mersenne.ENOUGH:  # at most four numbers are drawn here
            at = mersenne.refill(state, at)
        bits, at = mersenne.next_bits(state, at)
        # 80% become [MASK], 10% stay, 10% become any entry of the vocabulary (BERT's paper, 3.1).
        if bits >= _FOUR_FIFTHS:
            bits, at = mersenne.next_bits(state, at)
            if bits < _HALF:
                source = (
                    pair[0] + position - 1
                    if position <= length_a
                    else pair[2] + position - length_a - 2
                )
                new = np.int64(tokens[source])
            else:
                state[mersenne.INDEX] = np.uint32(at)
                # The index was stored, since next_below() reads it from the state.
                new = mersenne.next_below(state, vocabulary_size)
                at = np.int64(state[mersenne.INDEX])
        replaced[position] = (new << 16) | position
    state[mersenne.INDEX] = np.uint32(at)
    # Drawn in random order, stored by position, as the reference sorts them at last.
    for i in range(1, num_candidates + 2):
        masked[end] = replaced[i]
        end += np.int64(replaced[i] >= 0)
    return end


@compiled
def _random_run(state, documents, document_index, target, pair):  # type: ignore[no-untyped-def]
    """Fills pair[2:4] with segments of another document (ten tries), from a random one on, up to
    the target length.
    """
    order, document_offsets, segment_offsets = documents
    # After ten draws of this same document the reference takes it all the same, as it must where
    # a file holds no other.
    other = 0
    for _ in range(10):
        other = mersenne.next_below(state, order.size)
        if other != document_index:
            break
    first = document_offsets[order[other]]
    last = document_offsets[order[other] + 1]
    segment = first + mersenne.next_below(state, last - first)
    pair[2] = segment_offsets[segment]
    while segment < last:
        segment += 1
        pair[3] = segment_offsets[segment]
        if pair[3] - pair[2] >= target:
            break


@compiled
def _next_pair(state, documents, document_index, start, target, pair):  # type: ignore[no-untyped-def]
    """Makes the pair of the chunk that starts at segment `start`; returns the first unused
    segment.
    """
    order, document_offsets, segment_offsets = documents
    last = document_offsets[order[document_index] + 1]
    end = start + 1
    # A chunk ends with the document, or with the segment that reaches the target length.
    while end < last and segment_offsets[end] - segment_offsets[start] < target:
        end += 1
    chunk = end - start
    middle = start + 1
    if chunk >= 2:
        middle = start + 1 + mersenne.next_below(state, chunk - 1)
    pair[0] = segment_offsets[start]
    pair[1] = segment_offsets[middle]
    # A chunk of one segment draws no random(), like the reference's `or`.
    if chunk == 1 or mersenne.next_float(state) < 0.5:
        pair[4] = 1
        target_b = target - (pair[1] - pair[0])
        _random_run(state, documents, document_index, target_b, pair)
        return middle  # the unused segments are put back
    pair[4] = 0
    pair[2] = segment_offsets[middle]
    pair[3] = segment_offsets[end]
    return end


@compiled
def _next_instance(  # type: ignore[no-untyped-def]
    state, documents, document_index, start, target, max_num_tokens, nsp, pair
):
    """Fills the bounds of a pair, or of one run and an empty one; returns the first unused
    segment.
    """
    if not nsp:
        _, _, segment_offsets = documents
        pair[:] = 0
        pair[0] = segment_offsets[start]
        pair[1] = segment_offsets[start + 1]
        return start + 1
    start = _next_pair(state, documents, document_index, start, target, pair)
    _truncate(state, pair, max_num_tokens)
    return start


@compiled
def _space(size, max_seq_length, mask_type):  # type: ignore[no-untyped-def]
    """Arrays of `sample` to begin with, doubled when exceeded, and scratch space of `_mask`.

    For sequences of full length, and 15% of `size` tokens masked, for which a sixth is enough.
    """
    rows = max(16, size // (max_seq_length - 3))
    scratch = (
        np.empty(max_seq_length, dtype=np.int32),
        np.empty(max_seq_length, dtype=np.int64),
        np.empty(max_seq_length, dtype=mask_type.dtype),
    )
    pairs = np.empty((rows, 5), dtype=np.int64)
    masked = np.empty(max(max_seq_length, size // 6), dtype=mask_type.dtype)
    return pairs, np.zeros(rows + 1, dtype=np.int64), masked, scratch


@compiled
def sample(  # type: ignore[no-untyped-def]
    state,
    tokens,
    segment_offsets,
    document_offsets,
    special,
    vocabulary_size,
    mask_type,
    max_seq_length,
    short_seq_prob,
    dupe_factor,
    num_predictions,
    nsp,
):
    """All pairs in the order drawn: (N, 5) bounds and label, masked offsets (N + 1,), masks (M,).

    mask_type: an empty array with that dtype. nsp: make pairs; else each segment is a sequence.
    """
    # Documents are shuffled once, before all passes.
    order = np.arange(document_offsets.size - 1)
    mersenne.shuffle(state, order)
    documents = (order, document_offsets, segment_offsets)
    max_num_tokens = max_seq_length - 3
    size = dupe_factor * tokens.size
    pairs, masked_offsets, masked, scratch = _space(size, max_seq_length, mask_type)
    mask, count, at = np.int64(special[2]), 0, 0
    for number in range(dupe_factor * order.size):
        document_index = number % order.size
        target = max_num_tokens
        # Some targets are short, as fine-tuning sees short texts, too: randint(2, max_num_tokens).
        if nsp and mersenne.next_float(state) < short_seq_prob:
            target = 2 + mersenne.next_below(state, max_num_tokens - 1)
        document = order[document_index]
        start, last = document_offsets[document], document_offsets[document + 1]
        while start < last:
            if count + 1 >= pairs.shape[0]:
                pairs = grown(pairs)
                masked_offsets = grown(masked_offsets)
            # _mask() writes an entry for every token before it keeps the masked ones.
            if at + max_seq_length > masked.shape[0]:
                masked = grown(masked)
            pair = pairs[count]
            start = _next_instance(
                state,
                documents,
                document_index,
                start,
                target,
                max_num_tokens,
                nsp,
                pair,
            )
            # With [CLS] and the [SEP] after each segment.
            length = (3 if nsp else 2) + pair[1] - pair[0] + pair[3] - pair[2]
            most = num_predictions[length]
            at = _mask(
                state, tokens, pair, mask, vocabulary_size, most, scratch, masked, at
            )
            count += 1
            masked_offsets[count] = at
    return pairs[:count], masked_offsets[: count + 1], masked[:at]
