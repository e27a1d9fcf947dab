"""Tokenizer of the demo: byte-level BPE, which represents any text, and tokens of boxes.

Special tokens never appear in decoded text. Box tokens are ordinary added tokens, so decoding an
answer gives exactly the paper's box syntax.
"""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tools.demo import lexicon
from tools.demo.boxes import BIN_CENTRES
from vlora.vision.prompts import PLACEHOLDER, TASKS, task_text

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", PLACEHOLDER, "<|user|>", "<|assistant|>")
BOX_TOKENS = (
    *("<ref>", "</ref>", "<box>", "</box>"),
    *(f"({centre}," for centre in BIN_CENTRES),
    *(f"{centre})" for centre in BIN_CENTRES),
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{% else %}<|user|>{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VOCABULARY_LIMIT = 1100

_QUESTIONS = (
    "What color is the {w}?",
    "What shape is the {w} object?",
    "Is there a {w} in the picture?",
    "How many {w}s are there in the picture?",
    "How many objects are there in the picture?",
    "How many dots are there in the picture?",
    "What is the background color?",
    "What texture is the {w}?",
    "What symbol is this?",
    "What digit is this?",
    "What is the condition of the part?",
    "What material is the surface?",
    "Repeat: {w} {w}",
    "Describe the picture.",
)
_COMMON = (
    "the of and to in is it you that he was for on are with as his they be at one have this from "
    "or had by hot but some what there we can out other were all your when up use word how said "
    "an each she which do their time if will way about many then them would write like so these "
    "her long make thing see him two has look more day could go come did my no most people than "
    "please answer picture image video frame object left right top bottom large small person car "
    "dog cat house tree white black"
)


def corpus() -> list[str]:
    """Return the texts from which merges are learned: prompts of all tasks, and all words with and
    without a leading space."""
    tasks = [name for name, task in TASKS.items() if task.instruction is not None]
    lines = [task_text(name, "", PLACEHOLDER) for name in tasks] * 40
    lines += [_COMMON] * 20
    for word in lexicon.all_words():
        lines += [f"{word}\n", f"a {word} {word}", f"the {word}, {word}."] * 10
        lines += [question.replace("{w}", word) for question in _QUESTIONS] * 3
        lines += [lexicon.plural(word), f" {lexicon.plural(word)}"] * 5
    return lines


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer, trained on the task corpus. The result is always the same."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_LIMIT - len(BOX_TOKENS),
        min_frequency=5,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(corpus(), trainer)
    core.add_tokens([AddedToken(text, normalized=False, special=False) for text in BOX_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens={
            "image_token": PLACEHOLDER,
            "user_token": "<|user|>",
            "assistant_token": "<|assistant|>",
        },
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        padding_side="left",
    )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Return a checkpoint's tokenizer, without network access."""
    return PreTrainedTokenizerFast.from_pretrained(folder)
