//! The error file: a worker's own account of its failure, in the form of torch's `@record`.

use std::path::Path;
use std::time::SystemTime;
use std::{fs, io};

use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct File {
    message: Message,
}

#[derive(Serialize, Deserialize)]
struct Message {
    message: String,
    #[serde(rename = "extraInfo")]
    extra_info: ExtraInfo,
}

#[derive(Serialize, Deserialize)]
struct ExtraInfo {
    py_callstack: String,
    timestamp: String,
}

/// Writes why this worker fails to `path` (TORCHELASTIC_ERROR_FILE), for the launcher's report.
///
/// `message` is one line, `details` what the report shows below it (a backtrace, a chain of causes);
/// if `details` is empty the report shows `message`. An earlier file is replaced in one step.
///
/// # Errors
/// The file cannot be written.
pub fn write(path: &Path, message: &str, details: &str) -> io::Result<()> {
    let seconds = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let shown = if details.is_empty() { message } else { details };
    let file = File {
        message: Message {
            message: message.to_owned(),
            extra_info: ExtraInfo { py_callstack: shown.to_owned(), timestamp: seconds.to_string() },
        },
    };
    let temporary = path.with_extension("json.partial");
    fs::write(&temporary, serde_json::to_vec(&file)?)?;
    fs::rename(&temporary, path)
}
