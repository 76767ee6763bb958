//! Reads error files. In such a file a worker describes its own failure, by torch's `@record` or otherwise.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use serde_json::Value;

/// Longest error file that is read, in bytes. A job can fail on many ranks at once, each with its file.
const FILE_MAX_BYTES: u64 = 1 << 20;

/// What a worker's error file says about its failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ErrorFileContent {
    /// The time of the failure, in seconds since 1970.
    pub(super) seconds: Option<i64>,
    pub(super) traceback: String,
}

/// Reads an error file; `None` if there is none.
pub(super) fn read(path: &Path) -> Result<Option<ErrorFileContent>, String> {
    let Some(bytes) = bytes(path)? else { return Ok(None) };
    if bytes.len() as u64 > FILE_MAX_BYTES {
        let kib = FILE_MAX_BYTES >> 10;
        let traceback = format!("<the error file is longer than {kib} KiB and not shown here>");
        return Ok(Some(ErrorFileContent { seconds: None, traceback }));
    }
    let value = parse(path, &bytes)?;
    let Some(message) = value.get("message") else {
        return Err(format!("error file {} has no \"message\"", path.display()));
    };
    let text = |value: &Value| match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let timestamp = |value: &Value| value.get("timestamp").and_then(seconds);
    Ok(Some(match message {
        Value::Object(inner) => {
            let extra = inner.get("extraInfo");
            let stack = extra.and_then(|extra| extra.get("py_callstack"));
            let traceback = stack.or_else(|| inner.get("message")).map_or_else(|| "<N/A>".to_owned(), text);
            ErrorFileContent { seconds: extra.and_then(timestamp), traceback }
        }
        other => ErrorFileContent { seconds: timestamp(&value), traceback: text(other) },
    }))
}

/// Copies the error file at `path` to `target`, and adds the exit code as `errorCode`.
pub(super) fn copy_error_file(path: &Path, exit_code: i32, target: &Path) -> Result<(), String> {
    let Some(bytes) = bytes(path)? else { return Ok(()) };
    if bytes.len() as u64 > FILE_MAX_BYTES {
        let (path, target) = (path.display(), target.display());
        return Err(format!("error file {path} is too long to be copied to {target}"));
    }
    let mut value = parse(path, &bytes)?;
    if let Some(Value::Object(message)) = value.get_mut("message") {
        message.insert("errorCode".to_owned(), exit_code.into());
    }
    replace(target, value.to_string().as_bytes())
        .map_err(|error| format!("cannot write {}: {error}", target.display()))
}

/// Replaces the file `target` in one step, so that a reader never sees an incomplete file.
pub(super) fn replace(target: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut temporary = target.as_os_str().to_owned();
    temporary.push(format!(".partial.{}", std::process::id()));
    fs::write(&temporary, bytes)?;
    fs::rename(&temporary, target).inspect_err(|_| drop(fs::remove_file(&temporary)))
}

/// Returns the content of an error file, at most one byte more than [`FILE_MAX_BYTES`]; `None` if there is no
/// regular file.
fn bytes(path: &Path) -> Result<Option<Vec<u8>>, String> {
    let failed = |error: io::Error| format!("cannot read error file {}: {error}", path.display());
    match fs::metadata(path) {
        // A worker may have replaced its error file by another kind of file. Reading a FIFO would block.
        Ok(metadata) if !metadata.is_file() => return Ok(None),
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    }
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(FILE_MAX_BYTES + 1).read_to_end(&mut bytes))
        .map_err(failed)?;
    Ok(Some(bytes))
}

fn parse(path: &Path, bytes: &[u8]) -> Result<Value, String> {
    serde_json::from_slice(bytes)
        .map_err(|error| format!("error file {} is not valid JSON: {error}", path.display()))
}

/// Converts seconds, given as number or as text, with or without fraction.
fn seconds(value: &Value) -> Option<i64> {
    let number = match value {
        Value::Number(number) => number.as_f64()?,
        Value::String(text) => text.trim().parse::<f64>().ok()?,
        _ => return None,
    };
    // Torch writes 0 for "unknown". Times beyond the year 9999 are invalid.
    (1.0..253_402_300_800.0).contains(&number).then_some(number as i64)
}
