//! The error file: a worker writes the reason of its failure to it, in the format of torch's
//! `@record`.

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
