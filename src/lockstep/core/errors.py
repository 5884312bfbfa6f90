"""The errors that a user can meet, each with an exit code and one sentence: what is wrong, where, what fixes it."""

import importlib.util
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# A password may hold `/` and `@` that should have been escaped: all up to the last `@` of a word is hidden. pathlib
# leaves one slash of two.
_PASSWORD = re.compile(r"""(:/{1,2}[^\s:/'"]*:)[^\s'"]*@""")
_QUERY_SECRET = re.compile(
    r"""([?&;][\w.-]*(?:token|secret|passw|pwd|key|sig|credential)[\w.-]*=)[^\s&;'"]+""", re.IGNORECASE
)
# An error shows at most this many characters of a value, and this many digits of a number.
SHOWN_CHARACTERS, SHOWN_DIGITS = 80, 30
# The categories of Unicode for controls, formats (such as the writing direction), surrogates, and ends of lines.
UNSAFE = ("Cc", "Cf", "Cs", "Zl", "Zp")
# What Hydra and OmegaConf raise, without a message for users, for a value that they do not expect.
UNEXPECTED = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError, AssertionError)
MOST_ALIKE = 5  # the most mistakes of a kind that are told one by one
OF_YAML = {"None": "null", "True": "true", "False": "false"}
INSTALL = "install it with pip install"
INTERRUPTED = "interrupted twice: stopped at once; a resume continues from the last checkpoint"


class LockstepError(Exception):
    """A job cannot continue. Base of all errors that are shown as sentences, one in each argument and line."""

    exit_code = 70
    """The exit code of a command that ends with this error."""

    def __str__(self) -> str:
        return "\n".join(escaped(str(sentence), keep="") for sentence in self.args)


class InputError(LockstepError):
    """The user can fix the cause: a config, a file or a machine does not fit."""

    exit_code = 2


class BrokenImage(InputError):
    """An image cannot be decoded. The arguments of the exception are index, path and reason."""

    @property
    def failure(self) -> str:
        index, path, reason = self.args
        return escaped(f"image {index}, {path}, cannot be decoded ({reason})", keep="")

    @property
    def needs_package(self) -> bool:
        """Whether the image may be sound, and this machine lacks a package that decodes it; the reason names it."""
        return INSTALL in str(self.args[2])

    def __str__(self) -> str:
        return self.told("dataset.skip=N")

    def told(self, skip: str) -> str:
        """The sentence, where `skip` is what the user types to skip up to N such images."""
        doctor = "`lockstep doctor` looks for all of them"
        remedies = f"; remove or replace the file, or skip up to N of them with {skip}; {doctor}"
        return f"dataset: {self.failure}{remedies * (not self.needs_package)}"


class StorageError(LockstepError):
    """A file of the run could not be written."""

    exit_code = 74


class Stopped(LockstepError):
    """The job was asked to stop, saved, and can be resumed."""

    exit_code = 75


class NumericalError(LockstepError):
    """A loss or a weight is not finite, or a loss is absurdly high. `step` is the first such step."""

    exit_code = 76

    def __init__(self, sentence: str, step: int | None = None) -> None:
        super().__init__(sentence)
        self.step = step


class Interrupted(LockstepError):
    """The user interrupted twice: the job stopped at once, without saving."""

    exit_code = 130

    def __init__(self, sentence: str = INTERRUPTED) -> None:
        super().__init__(sentence)


class RankFailed(LockstepError):
    """A rank raised or died. `details` is the traceback of the first rank that did."""

    def __init__(self, sentence: str, details: str = "") -> None:
        super().__init__(sentence)
        self.details = details


def as_known(error: BaseException) -> LockstepError:
    """`error` itself if it is a LockstepError, otherwise a LockstepError with a message that begins with its type."""
    return error if isinstance(error, LockstepError) else LockstepError(f"{type(error).__name__}: {error}")


def reason_of(error: BaseException) -> str:
    """The reason that a library gives in its error, in one line; the type of the error if it gives none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def out_of_memory(error: BaseException, place: object = None) -> LockstepError | None:
    """The error of a host that gave a library no memory or no thread, reading `place`; None for any other error."""
    in_words = ("can't start new thread", "annot allocate memory", "map segment", "Resource temporarily unavailable")
    system = isinstance(error, OSError | RuntimeError | ImportError) and any(word in str(error) for word in in_words)
    if not (system or isinstance(error, MemoryError)):
        return None
    reason = " ".join(f"{type(error).__name__} {error}".split())
    where = "" if place is None else f" while {place} was read"
    return LockstepError(
        f"out of memory{where} ({reason}); allow more (ulimit -v unlimited, ulimit -u), or use a smaller batch, "
        "loader.workers=0 or launcher.threads=1"
    )


@contextmanager
def collecting(problems: list[str]) -> Iterator[None]:
    """Add the lines of an InputError to `problems`, so that the user sees all of them at once."""
    try:
        yield
    except InputError as error:
        problems.extend(error.args)


def first_of(sentences: Sequence[str], most: int = MOST_ALIKE) -> list[str]:
    """The first sentences of many mistakes of a kind, and how many more there are."""
    rest = len(sentences) - most
    return [*sentences[:most], *[f"and {rest:,} more" for _ in range(rest > 0)]]


BY_EXIT_CODE: dict[int, type[LockstepError]] = {
    cls.exit_code: cls for cls in (InputError, StorageError, Stopped, NumericalError, Interrupted)
}


def close_to(word: str, options: Iterable[str]) -> list[str]:
    """The options closest to `word`, at most three: first those that begin with it. Case and dashes do not matter."""
    import difflib  # only a mistake needs it

    originals = {option.lower().replace("-", "_"): option for option in options}
    key = word.lower().replace("-", "_")
    completions = sorted((name for name in originals if name.startswith(key)), key=len) if len(key) >= 3 else []
    close = [*completions, *difflib.get_close_matches(key, originals, n=3, cutoff=0.65)]
    return [originals[name] for name in dict.fromkeys(close)][:3]


def did_you_mean(word: str, options: Iterable[str], *, prefix: str = "") -> str:
    """` Did you mean 'a', 'b'?` for the options close to `word`, each with `prefix`; empty if none is close."""
    close = close_to(word, options)
    return f" Did you mean {', '.join(repr(prefix + name) for name in close)}?" if close else ""


def masked(text: str) -> str:
    """`text` with `***` for the secrets in its URLs: passwords (`user:password@host`) and keys (`?token=`)."""
    return _QUERY_SECRET.sub(r"\1***", _PASSWORD.sub(r"\1***@", text)) if ":/" in text else text


def escaped(text: str, keep: str = "\n\t") -> str:
    """`text` as it may be shown: without secrets, and with control characters (ESC, CR, C1) as `\\x1b` and so on."""
    text = masked(text)
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else character.encode("unicode_escape").decode()
        for character in text
    )


def is_one_line(text: str) -> bool:
    """Whether a text is valid Unicode without control characters: none that ends a line, or changes its direction.

    The two joiners are allowed: scripts of India and Persia, and emoji, are written with them.
    """
    return all(unicodedata.category(char) not in UNSAFE or char in "\u200c\u200d" for char in text)


def shown(value: Any) -> str:
    """A value for a sentence, as YAML has it. A long text is cut; a very long number is replaced by its length."""
    if isinstance(value, int) and abs(value) >= 10**SHOWN_DIGITS:
        return f"a number of more than {SHOWN_DIGITS} digits"
    listed = f"[{', '.join(map(shown, value[:SHOWN_CHARACTERS]))}]" if isinstance(value, list) else ""
    text = listed or (repr(value) if isinstance(value, str) else str(value))
    return OF_YAML.get(text, text) if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


def percent(share: float, form: str = ".0f") -> str:
    """A share for use in a sentence: `12 %`."""
    return f"{100 * share:{form}} %"


def check_installed(package: str, user: str, extra: str = "") -> None:
    """Refuse `user`, an option or a command, without the package that it needs, which is in Lockstep's `extra`."""
    if importlib.util.find_spec(package) is None:
        raise InputError(
            f"{user} needs the package {package}, which is not installed; {INSTALL} 'lockstep[{extra or package}]'"
        )


def as_unicode(text: str) -> str:
    """A text without the bytes of a file's name that are no text, as trackers and pages need it."""
    return text.encode(errors="backslashreplace").decode()


# Native Windows is refused here, before a module is imported that needs POSIX.
if sys.platform == "win32":
    UNSUPPORTED = ImportError("Lockstep does not run on native Windows; run it in WSL2 (wsl --install)")
    before = sys.excepthook

    def show_unsupported(kind, error, traceback):  # type: ignore[no-untyped-def]
        """End a command that has not caught the error like any other mistake of its user."""
        if error is not UNSUPPORTED:
            return before(kind, error, traceback)
        sys.stderr.write(f"lockstep: {error}\n")
        sys.exit(2)

    sys.excepthook = show_unsupported
    raise UNSUPPORTED  # another program catches it: Hydra looks for the plugins of everything that is installed
