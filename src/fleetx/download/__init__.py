"""Download files once per node, verify them by hash before use, unpack them within limits. Public as `fleetx.utils.Downloader`.

downloader       Downloader: the order of the work, and the record of what is complete
manifest         the list of files, read from YAML or JSON
transport        addresses that may be used, and one attempt to read one
fetch            one file: retried, resumed by Range, verified, renamed into place
once_per_node    the lock, and the result that waiting processes take over
unpack, writer   archives: read with limits on memory; written with limits on bytes and files
folder           names and descriptors below the target
reporter         progress on a terminal or in a log

Built on urllib, tarfile, zipfile and flock, not on a library of downloads: pooch and fsspec start an interrupted file from
its first byte and follow redirects from https to http, and pooch unpacks without limits, as tarfile does with its data
filter. filelock locks the same way, but opens its file by path and not below the folder that is held open.
"""
