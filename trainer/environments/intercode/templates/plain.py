"""Numbers, dates and strings: no file is needed."""

from __future__ import annotations

from trainer.environments.intercode.templates.template import Template


def _plain(gold: str, *questions: str, wrong: tuple[str, ...] = ()) -> Template:
    return Template(gold, questions, kinds=(4,), wrong=wrong)


NO_FILES: tuple[Template, ...] = (
    _plain(
        "echo $((<num> * <num2>))",
        "print the product of <num> and <num2>",
        "calculate <num> times <num2>",
        "multiply <num> by <num2> and display the result",
        "what is <num> multiplied by <num2>?",
    ),
    _plain(
        "echo $((<num> + <num2>))",
        "print the sum of <num> and <num2>",
        "calculate <num> plus <num2>",
        "add <num2> to <num> and display the result",
        "what is <num> + <num2>?",
    ),
    _plain(
        "seq 1 <m>",
        "print the numbers from 1 to <m>, one per line",
        "display a sequence of integers from 1 up to <m>",
        "count from 1 to <m>, each number on its own line",
        "output all whole numbers between 1 and <m>",
    ),
    _plain(
        "seq -s ',' 1 <m>",
        "print the numbers from 1 to <m> separated by commas",
        "display a comma-separated sequence of 1 to <m> on one line",
        "output 1 to <m> on a single line with commas in between",
        "join the integers 1 through <m> with commas",
        wrong=("seq 1 <m>",),
    ),
    _plain(
        "seq 2 2 <num>",
        "print the even numbers up to <num>",
        "display every even integer from 2 to <num>",
        "count in steps of two from 2 to <num>",
        "output all even numbers that are not larger than <num>, starting at 2",
    ),
    _plain(
        "seq 1 <num> | awk '{sum += $1} END {print sum}'",
        "print the sum of all integers from 1 to <num>",
        "add up the numbers 1 to <num>",
        "what is the total of the whole numbers from 1 through <num>?",
        "calculate 1 + 2 + ... + <num>",
    ),
    _plain(
        "date -d '<date>' +%A",
        "print the weekday of <date>",
        "on which day of the week was <date>?",
        "show the name of the day for the date <date>",
        "which weekday is <date>?",
    ),
    _plain(
        "date -d '<date> + <n> days' +%Y-%m-%d",
        "print the date <n> days after <date> in the form YYYY-MM-DD",
        "which date is <n> days later than <date>? Use YYYY-MM-DD",
        "add <n> days to <date> and show the date as YYYY-MM-DD",
        "calculate <date> plus <n> days, printed as YYYY-MM-DD",
    ),
    _plain(
        "date -u -d @<stamp> '+%Y-%m-%d %H:%M:%S'",
        "convert the unix timestamp <stamp> to UTC in the form YYYY-MM-DD HH:MM:SS",
        "print the UTC date and time of the epoch time <stamp> as YYYY-MM-DD HH:MM:SS",
        "show which UTC time <stamp> seconds since the epoch is, as YYYY-MM-DD HH:MM:SS",
        "format <stamp>, seconds since 1970, as YYYY-MM-DD HH:MM:SS in UTC",
        wrong=("date <stamp>",),
    ),
    _plain(
        "echo '<phrase>' | rev",
        "print '<phrase>' with its characters reversed",
        "reverse the string '<phrase>'",
        "show the text '<phrase>' backwards",
        "write '<phrase>' from right to left",
    ),
    _plain(
        "echo '<phrase>' | tr 'a-z' 'A-Z'",
        "print '<phrase>' in capital letters",
        "convert the string '<phrase>' to upper case",
        "show '<phrase>' with all letters in upper case",
        "turn '<phrase>' into its upper-case form",
    ),
    _plain(
        "echo '<phrase>' | tr ' ' '\\n'",
        "print each word of '<phrase>' on a line of its own",
        "split '<phrase>' at the blanks, one word per line",
        "show the words of the string '<phrase>' below each other",
        "replace blanks by line ends in '<phrase>' and print it",
    ),
    _plain(
        "echo '<phrase>' | wc -w",
        "count the words in '<phrase>'",
        "how many words does the string '<phrase>' have?",
        "print the number of words of '<phrase>'",
        "show the word count of '<phrase>'",
    ),
    _plain(
        "echo -n '<phrase>' | wc -c",
        "print the length of the string '<phrase>' in bytes",
        "count the characters of '<phrase>', without a line end",
        "how many bytes does the text '<phrase>' have?",
        "show the length of '<phrase>'",
        wrong=("echo '<phrase>' | wc",),
    ),
    _plain(
        "echo '<phrase>' | sed 's/ /_/g'",
        "print '<phrase>' with underscores in place of blanks",
        "replace all spaces in '<phrase>' by underscores",
        "show the string '<phrase>' after changing each blank to _",
        "turn the blanks of '<phrase>' into underscores",
    ),
    _plain(
        "echo -n '<phrase>' | md5sum | cut -d ' ' -f 1",
        "print the md5 hash of the string '<phrase>', without a line end and without a file name",
        "calculate the md5 sum of the text '<phrase>' (no trailing newline) and show only the hash",
        "hash '<phrase>' with md5, not counting a newline, and print the digits alone",
        "what is the md5 checksum of the exact string '<phrase>'? Print just the checksum",
        wrong=("echo '<phrase>' | md5sum",),
    ),
    _plain(
        "echo -n '<phrase>' | base64",
        "encode the string '<phrase>' in base64, without a line end in it",
        "print the base64 form of '<phrase>' (no trailing newline)",
        "convert the text '<phrase>' to base64, not counting a newline",
        "show '<phrase>' as base64, encoding exactly these characters",
        wrong=("echo '<phrase>' | base64",),
    ),
    _plain(
        "printf '%x\\n' <num>",
        "print <num> as a hexadecimal number",
        "convert the decimal number <num> to hex",
        "show <num> in hexadecimal, small letters",
        "what is <num> in base 16?",
    ),
    _plain(
        "printf '%05d\\n' <num>",
        "print <num> with leading zeros to a width of five digits",
        "pad the number <num> with zeros to 5 digits",
        "show <num> as a five-digit number, zeros in front",
        "format <num> so that it has 5 digits, filled up with zeros",
    ),
    _plain(
        "printf '<word>\\n%.0s' $(seq 1 <n>)",
        "print the word <word> <n> times, one per line",
        "repeat '<word>' on <n> lines",
        "output <n> lines that each consist of '<word>'",
        "write <word> <n> times, each on its own line",
    ),
    _plain(
        "printf '%s\\n' <word> <other> <third> | sort",
        "sort the words <word>, <other> and <third> and print one per line",
        "print <word> <other> <third> in alphabetical order, each on its own line",
        "put the words <word>, <other>, <third> into order, one per line",
        "show <word>, <other> and <third> sorted alphabetically below each other",
    ),
    _plain(
        "echo $((2 ** <n>))",
        "print 2 to the power of <n>",
        "calculate 2^<n>",
        "raise two to the power <n> and show the result",
        "what is the <n>th power of 2?",
    ),
    _plain(
        "echo '<csvline>' | cut -d ',' -f 2",
        "print the second comma-separated field of '<csvline>'",
        "extract field 2 from the string '<csvline>', separated by commas",
        "what stands between the first and the second comma of '<csvline>'?",
        "show the second item in the list '<csvline>'",
    ),
    _plain(
        "whoami",
        "print the name of the current user",
        "which user am I?",
        "show the user name of this shell's owner",
        "display the effective user's name",
    ),
)
