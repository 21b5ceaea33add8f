"""Look at folders, and change what is in them."""

from __future__ import annotations

from trainer.environments.intercode.templates.template import Template

FOLDERS: tuple[Template, ...] = (
    Template(
        "ls -A <dir>",
        (
            "list everything in <dir>, hidden entries too, except . and ..",
            "show all names in the directory <dir> including hidden ones, but without . and ..",
            "print the almost complete listing of <dir>: all entries besides . and ..",
            "which entries, hidden ones included, does <dir> have? Leave out . and ..",
        ),
        wrong=("ls <dir>",),
    ),
    Template(
        "ls <dir> | wc -l",
        (
            "count the entries that are not hidden in the directory <dir>",
            "how many visible files and folders are directly in <dir>?",
            "print the number of names that ls shows for <dir>",
            "number of non-hidden entries at the top level of <dir>",
        ),
        wrong=("ls <dir>",),
    ),
    Template(
        "ls -1 <dir> | sort -r",
        (
            "list the names in <dir> in reverse alphabetical order, one per line",
            "print the visible entries of <dir> sorted from z to a",
            "show the contents of the directory <dir> in descending order of name",
            "display names in <dir>, reverse sorted, each on a line of its own",
        ),
    ),
    Template(
        "du -sh <dir>",
        (
            "print the total disk usage of <dir> in human readable form",
            "how much space does <dir> take? Print one human-readable line",
            "show a summary of the disk usage of <dir> with a readable unit",
            "display the size on disk of the whole tree <dir>, human readable",
        ),
        wrong=("du <dir>", "du -h <dir>"),
    ),
    Template(
        "du -h --max-depth=1 <dir>",
        (
            "print the disk usage of <dir> and of each directory directly below it, human readable",
            "show human-readable sizes of the first-level subdirectories of <dir>",
            "display how much space <dir> and its immediate subfolders take, with readable units",
            "summarize disk usage in <dir> one level deep in human readable form",
        ),
        wrong=("du <dir>",),
    ),
    Template(
        "find <dir> -mindepth 1 -maxdepth 1 -type d | wc -l",
        (
            "count the subdirectories directly in <dir>",
            "how many folders are immediately below <dir>?",
            "print the number of first-level directories in <dir>",
            "number of direct subfolders of <dir>",
        ),
        wrong=("find <dir> -type d | wc -l",),
    ),
    Template(
        "tar -tzf <archive>",
        (
            "list the contents of the archive <archive>",
            "print the names of the files packed in <archive>",
            "show what is in <archive> without unpacking it",
            "which files does the compressed archive <archive> contain?",
        ),
        kinds=(2, 3),
        wrong=("ls <archive>",),
    ),
    Template(
        "tar -tzf <archive> | wc -l",
        (
            "count the entries of the archive <archive>",
            "how many files are packed in <archive>?",
            "print the number of members in <archive>",
            "number of entries in the compressed archive <archive>",
        ),
        kinds=(2, 3),
    ),
)

CHANGING: tuple[Template, ...] = (
    Template(
        "mkdir -p <dir>/<new>/<name>",
        (
            "create the directory <dir>/<new>/<name> with its parent",
            "make a folder <name> in the new folder <new> of <dir>",
            "create <dir>/<new>/<name>, including directories that are missing on the way",
            "set up the nested directory <new>/<name> inside <dir>",
        ),
        wrong=("ls <dir>/<new>",),
    ),
    Template(
        "touch <dir>/<new>.txt",
        (
            "create an empty file <new>.txt in <dir>",
            "make a new empty file named <dir>/<new>.txt",
            "put an empty text file called <new>.txt into the directory <dir>",
            "create <dir>/<new>.txt with no content",
        ),
    ),
    Template(
        "cp <file> <dir>/<new>.bak",
        (
            "copy <file> to <dir>/<new>.bak",
            "make a copy of <file> named <new>.bak in <dir>",
            "save a backup of <file> as <dir>/<new>.bak",
            "duplicate the file <file> under the new path <dir>/<new>.bak",
        ),
    ),
    Template(
        "mv <file> <file>.old",
        (
            "rename <file> by adding .old to its name",
            "append the suffix .old to the name of the file <file>",
            "move <file> to the same path with .old at its end",
            "give <file> the new name that ends with .old in addition",
        ),
        wrong=("rename -n .old <file>",),
    ),
    Template(
        "rm <file>",
        (
            "delete the file <file>",
            "remove <file>",
            "erase the file <file> from the file system",
            "get rid of the single file <file>",
        ),
    ),
    Template(
        "find <sub> -type f -name '*.<ext>' -delete",
        (
            "delete all .<ext> files in <sub> recursively",
            "remove every file with the extension <ext> below <sub>",
            "erase *.<ext> files from the tree <sub>",
            "clean <sub> and its subfolders of <ext> files",
        ),
        wrong=("find <sub> -name '*.<ext>'",),
    ),
    Template(
        "find <root> -type f -empty -delete",
        (
            "delete all empty files in <root>",
            "remove the files without content below <root>",
            "erase every zero-length regular file in the tree <root>",
            "get rid of empty files under <root>",
        ),
        wrong=("find <root> -empty",),
    ),
    Template(
        "sed -i 's/<word>/<other>/g' <text>",
        (
            "replace every '<word>' by '<other>' in the file <text>",
            "substitute <other> for all occurrences of <word> in <text>, in place",
            "change '<word>' to '<other>' everywhere in <text> and save the file",
            "edit <text> in place so that <word> becomes <other>",
        ),
        wrong=("grep '<word>' <text>",),
    ),
    Template(
        "sed -i '/<word>/d' <text>",
        (
            "delete all lines with '<word>' from the file <text>",
            "remove lines that contain <word> from <text>, in place",
            "edit <text> so that no line matching '<word>' is left",
            "drop every line of <text> in which <word> occurs and save the file",
        ),
        wrong=("grep -n '<word>' <text>",),
    ),
    Template(
        "sed -i '/^$/d' <blank>",
        (
            "delete the empty lines from the file <blank>",
            "remove all blank lines in <blank>, in place",
            "edit <blank> so that it has no empty line left",
            "strip empty lines from <blank> and save the file",
        ),
    ),
    Template(
        "echo '<word> <other>' >> <text>",
        (
            "append the line '<word> <other>' to <text>",
            "add '<word> <other>' as a new line at the end of the file <text>",
            "write '<word> <other>' to the end of <text>, keeping what is there",
            "put one more line, '<word> <other>', at the bottom of <text>",
        ),
        wrong=("tail -n 1 <text>",),
    ),
    Template(
        "sort <text> > <dir>/<new>.txt",
        (
            "sort the lines of <text> and save the result as <dir>/<new>.txt",
            "write the sorted contents of <text> to the file <dir>/<new>.txt",
            "store <text> in alphabetical order of lines in <dir>/<new>.txt",
            "create <dir>/<new>.txt from the sorted lines of <text>",
        ),
        wrong=("sort <text>",),
    ),
    Template(
        "find <dir> -type f -name '*.<ext>' | sort > <root>/<new>.txt",
        (
            "save a sorted list of the paths of all .<ext> files in <dir> to <root>/<new>.txt",
            "write the paths of *.<ext> files below <dir>, sorted, to the file <root>/<new>.txt",
            "find <ext> files under <dir> and store their sorted paths in <root>/<new>.txt",
            "create the file <root>/<new>.txt with the sorted paths of the <ext> files in the tree <dir>",
        ),
        wrong=("find <dir> -name '*.<ext>'",),
    ),
    Template(
        "ln -s <file> <root>/<new>",
        (
            "create a symbolic link <root>/<new> to <file>",
            "make <root>/<new> a symlink that points to <file>",
            "link <file> symbolically as <root>/<new>",
            "set up the soft link <root>/<new> with the target <file>",
        ),
    ),
    Template(
        "gzip <text>",
        (
            "compress the file <text> with gzip",
            "gzip <text>",
            "replace <text> by its gzip-compressed version",
            "compress <text> in place using gzip",
        ),
        wrong=("gzip -l <text>",),
    ),
    Template(
        "cp -r <sub> <root>/<new>",
        (
            "copy the directory <sub> with all of its contents to <root>/<new>",
            "make a recursive copy of <sub> named <root>/<new>",
            "duplicate the folder <sub> as <root>/<new>",
            "copy the whole tree <sub> to the new path <root>/<new>",
        ),
        wrong=("ls -R <sub>",),
    ),
    Template(
        "find <dir> -type f -name '*.<ext>' -exec cp {} /backup/ \\;",
        (
            "copy all .<ext> files in <dir> to /backup",
            "find every file with the extension <ext> below <dir> and copy it to /backup",
            "back up the *.<ext> files of the tree <dir> into the directory /backup",
            "copy <ext> files from <dir> and its subfolders into /backup",
        ),
        kinds=(3,),
        wrong=("cp <dir>/*.<ext> /nowhere/",),
    ),
    Template(
        "mv <text> /backup/",
        (
            "move <text> into /backup",
            "relocate the file <text> to the directory /backup",
            "put <text> into /backup and remove it from where it is",
            "transfer <text> to the folder /backup by moving it",
        ),
        kinds=(3,),
    ),
    Template(
        "chmod <perm> <file>",
        (
            "set the permissions of <file> to <perm>",
            "change the mode of <file> to <perm>",
            "give the file <file> the access rights <perm>",
            "make <perm> the permission bits of <file>",
        ),
        silent=True,
        wrong=("ls -s <file>",),
    ),
    Template(
        "find <dir> -type f -name '*.<ext>' -exec chmod u+x {} +",
        (
            "make all .<ext> files in <dir> executable by their owner",
            "give the owner execute permission for every *.<ext> file below <dir>",
            "set the owner's execute bit of each <ext> file in the tree <dir>",
            "let owners execute the <ext> files under <dir>",
        ),
        silent=True,
        wrong=("find <dir> -name '*.<ext>'",),
    ),
)
