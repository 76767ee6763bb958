//! The error file: a worker writes the reason of its failure to it, in the format of torch's
//! `@record`.

use std::path::Path;
use std::time::SystemTime;
use std::{fs, io};

use serde_json::json;

/// Writes the reason of this worker's failure to `path` (TORCHELASTIC_ERROR_FILE). The launcher shows
/// it in its report.
///
/// `message` is one line. `details` are the lines below it, such as a backtrace or a chain of causes;
/// if they are empty, the report shows `message` instead. An earlier file at `path` is replaced
/// atomically.
///
/// # Errors
/// Fails if the file cannot be written.
pub fn write(path: &Path, message: &str, details: &str) -> io::Result<()> {
    let seconds = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let shown = if details.is_empty() { message } else { details };
    let extra_info = json!({"py_callstack": shown, "timestamp": seconds.to_string()});
    let file = json!({"message": {"message": message, "extraInfo": extra_info}});
    let temporary = path.with_extension("json.partial");
    fs::write(&temporary, serde_json::to_vec(&file)?)?;
    fs::rename(&temporary, path)
}
