"""Read, count, sort and compare what is in files."""

from __future__ import annotations

from trainer.environments.intercode.templates.template import Template

TEXTS: tuple[Template, ...] = (
    Template(
        "wc -l < <text>",
        (
            "print only the number of lines in <text>",
            "how many lines are there in <text>? Print just the number",
            "count the lines of <text> without printing its name",
            "show the line count of <text> as a bare number",
        ),
        wrong=("wc -l <text>",),
    ),
    Template(
        "wc -w < <text>",
        (
            "print only the number of words in <text>",
            "how many words does <text> have? Print just the number",
            "count words in <text>, without its name in the output",
            "show the word count of <text> as a bare number",
        ),
        wrong=("wc <text>",),
    ),
    Template(
        "wc -c <file>",
        (
            "print the number of bytes of <file> and its name",
            "count the bytes in <file>",
            "show the byte count of <file> with wc",
            "how many bytes does <file> contain?",
        ),
    ),
    Template(
        "head -n <n> <text>",
        (
            "print the first <n> lines of <text>",
            "show the top <n> lines in <text>",
            "display lines 1 to <n> of <text>",
            "output the beginning of <text>, <n> lines of it",
        ),
        wrong=("cat <text>",),
    ),
    Template(
        "tail -n <n> <text>",
        (
            "print the last <n> lines of <text>",
            "show the final <n> lines in <text>",
            "display the end of <text>, <n> lines of it",
            "output the bottom <n> lines of <text>",
        ),
        wrong=("tail <text>",),
    ),
    Template(
        "sed -n '<n>p' <text>",
        (
            "print line <n> of <text>",
            "show only line number <n> in <text>",
            "display line <n> of the file <text> and nothing else",
            "output just line <n> from <text>",
        ),
        wrong=("head -n <n> <text>",),
    ),
    Template(
        "sed -n '2,<m>p' <text>",
        (
            "print lines 2 to <m> of <text>",
            "show <text> from line 2 up to line <m>",
            "display the lines with numbers 2 through <m> in <text>",
            "output the range of lines 2-<m> from <text>",
        ),
    ),
    Template(
        "sort <text>",
        (
            "sort the lines of <text> and print them",
            "print <text> with its lines in alphabetical order",
            "display the sorted contents of <text>",
            "output the lines of <text> in ascending order",
        ),
    ),
    Template(
        "sort -r <text> | uniq",
        (
            "print the different lines of <text> in reverse order",
            "sort <text> in descending order and drop repeated lines",
            "show unique lines of <text>, reverse sorted",
            "output the lines of <text> sorted backwards, without duplicates",
        ),
        wrong=("sort -r <text>",),
    ),
    Template(
        "sort <text> | uniq -d",
        (
            "print lines that occur more than once in <text>",
            "show the duplicated lines of <text>, once each",
            "find repeated lines in <text>",
            "which lines of <text> are duplicates?",
        ),
        wrong=("uniq -d <text>",),
    ),
    Template(
        "tr -s ' ' '\\n' < <text> | sort | uniq -c | sort -k 1,1nr -k 2 | head -n <n>",
        (
            "print the <n> most frequent words of <text> with their counts, ties in alphabetical order",
            "count the words in <text> and show the <n> commonest, by count and then by word",
            "show how often each word occurs in <text>: the top <n>, by count, then alphabetically",
            "list the <n> most common words in <text> preceded by their number, ties sorted by word",
        ),
    ),
    Template(
        "tr 'a-z' 'A-Z' < <text>",
        (
            "print <text> in upper case",
            "convert the contents of <text> to upper case and display them",
            "show <text> with all small letters turned into capital letters",
            "output the upper-case version of <text>",
        ),
    ),
    Template(
        "tac <text>",
        (
            "print the lines of <text> in reverse order",
            "show <text> from its last line to its first",
            "display <text> backwards by lines",
            "output the file <text> with the order of lines reversed",
        ),
        wrong=("rev <text>",),
    ),
    Template(
        "nl -b a <text>",
        (
            "print <text> and number all of its lines with nl, empty ones too",
            "use nl to show <text> with a number on every line, blank lines included",
            "number each line of <text>, also the empty ones, with nl",
            "display <text> with nl so that every line has a number",
        ),
        wrong=("nl <text>",),
    ),
    Template(
        "awk '{print $1}' <text>",
        (
            "print the first word of each line in <text>",
            "show the first column of <text>, columns being separated by blanks",
            "extract the first field of every line of <text>",
            "output only the leading word of all lines in <text>",
        ),
        wrong=("cut -f 1 <text>",),
    ),
    Template(
        "awk '{print $NF}' <text>",
        (
            "print the last word of each line in <text>",
            "show the final field of every line of <text>",
            "extract the last column of <text>, columns being separated by blanks",
            "output only the last word of all lines in <text>",
        ),
    ),
    Template(
        "awk '{print NF}' <text>",
        (
            "print the number of words on each line of <text>",
            "for every line in <text>, show how many fields it has",
            "count the words of <text> line by line",
            "output the field count of each line in <text>",
        ),
        wrong=("wc -w <text>",),
    ),
    Template(
        "awk 'length > 30' <text>",
        (
            "print the lines of <text> that are longer than 30 characters",
            "show lines with more than 30 characters in <text>",
            "which lines in <text> have a length above 30?",
            "filter <text> for lines of over 30 characters",
        ),
    ),
    Template(
        "grep -v '^$' <text>",
        (
            "print <text> without its empty lines",
            "show the non-empty lines of <text>",
            "remove blank lines from the output of <text>, leaving the file as it is",
            "display only lines in <text> that are not empty",
        ),
    ),
    Template(
        "sed 's/<word>/<other>/g' <text>",
        (
            "print <text> with every '<word>' replaced by '<other>', leaving the file as it is",
            "show the contents of <text> after substituting <other> for <word>, without changing the file",
            "output <text> with all occurrences of '<word>' turned into '<other>'",
            "replace <word> with <other> in the output of <text>, but do not modify the file",
        ),
    ),
    Template(
        "cut -d ',' -f 2 <csv>",
        (
            "print the second column of the comma-separated file <csv>",
            "extract field 2 of every line in <csv>, using a comma as separator",
            "show only the second field of the csv file <csv>",
            "output column 2 from <csv>",
        ),
        kinds=(1, 3),
        wrong=("awk '{print $2}' <csv>",),
    ),
    Template(
        "tail -n +2 <csv> | sort -t ',' -k 2 -n",
        (
            "sort the rows of <csv> numerically by their second column, leaving out the header",
            "print <csv> without its first line, ordered by the number in column 2",
            "skip the header of <csv> and sort the other lines by the second field as numbers",
            "show the data rows of <csv> in ascending numeric order of field 2",
        ),
        kinds=(1, 3),
    ),
    Template(
        "awk -F ',' 'NR > 1 {sum += $2} END {print sum}' <csv>",
        (
            "print the sum of the second column of <csv>, leaving out the header line",
            "add up the numbers in field 2 of the csv file <csv>, first line excluded",
            "what is the total of column 2 in <csv> below its header?",
            "sum the second comma-separated field over all data rows of <csv>",
        ),
        kinds=(1, 3),
    ),
    Template(
        "cut -d ' ' -f 1 <log> | sort | uniq -c",
        (
            "count how many lines of each level (the first word) are in the log <log>",
            "print how often each first word occurs in <log>, sorted by word",
            "for the first field of every line of <log>, show the number of occurrences of each value",
            "summarize <log>: the number of lines per leading word",
        ),
        kinds=(2, 3),
    ),
    Template(
        "grep '^ERROR' <log> | tail -n 1",
        (
            "print the last line of <log> that begins with ERROR",
            "show the most recent ERROR line in <log>, which is appended to at its end",
            "find the final line starting with ERROR in <log>",
            "which is the last line in <log> with ERROR at its beginning?",
        ),
        kinds=(2, 3),
        wrong=("tail -n 1 <log>",),
    ),
    Template(
        "md5sum <file>",
        (
            "print the md5 sum of <file>",
            "calculate the md5 checksum of <file>",
            "show the md5 hash of the file <file>",
            "compute md5sum for <file>",
        ),
        wrong=("md5 <file>",),
    ),
    Template(
        "stat -c %s <file>",
        (
            "print the size of <file> in bytes, just the number",
            "show only the byte size of <file>",
            "how large is <file> in bytes? Print the number alone",
            "output the file size of <file> in bytes without its name",
        ),
        wrong=("ls -s <file>",),
    ),
    Template(
        "stat -c %a <file>",
        (
            "print the permissions of <file> in octal form",
            "show the octal mode of <file>",
            "which access rights does <file> have, as an octal number?",
            "output the permission bits of <file> as octal digits",
        ),
        wrong=("ls -s <file>",),
    ),
    Template(
        "od -A n -t x1 -N <m> <file> | tr -d ' \\n'",
        (
            "print the first <m> bytes of <file> as one hexadecimal string",
            "convert the first <m> characters in <file> to a single hexadecimal value",
            "show the leading <m> bytes of <file> in hex without blanks",
            "dump <m> bytes from the start of <file> as continuous hex digits",
        ),
        wrong=("od -N <m> <file>",),
    ),
    Template(
        "diff <text> <text2>",
        (
            "show the differences between <text> and <text2>",
            "compare <text> with <text2> line by line",
            "print how <text> and <text2> differ",
            "run a line-wise comparison of the files <text> and <text2>",
        ),
    ),
    Template(
        "comm -12 <(sort <text>) <(sort <text2>)",
        (
            "print the lines that <text> and <text2> have in common",
            "show lines which occur in both <text> and <text2>, sorted",
            "find the common lines of <text> and <text2>",
            "which lines are in <text> as well as in <text2>?",
        ),
        silent=True,
        wrong=("comm -12 <text> <text2>",),
    ),
    Template(
        "cat <text> <text2> | wc -l",
        (
            "count the lines of <text> and <text2> together",
            "how many lines do <text> and <text2> have in total? Print only the number",
            "print the total line count of the files <text> and <text2>",
            "sum of the numbers of lines in <text> and <text2>",
        ),
        wrong=("wc -l <text> <text2>",),
    ),
    Template(
        "basename <file>",
        (
            "print the name of <file> without its directory",
            "strip the directory part from the path <file>",
            "show only the last component of the path <file>",
            "what is the base name of <file>?",
        ),
    ),
    Template(
        "dirname <file>",
        (
            "print the directory part of the path <file>",
            "strip the last component from the path <file>",
            "show in which directory <file> lies, as dirname prints it",
            "what is the parent directory in the path <file>?",
        ),
    ),
)
