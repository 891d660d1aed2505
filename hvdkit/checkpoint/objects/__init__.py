"""Steps in an object store, such as S3, through fsspec. See `storage`."""
