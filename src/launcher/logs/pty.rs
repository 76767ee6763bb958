//! Provides a pseudo-terminal for a worker's stderr that the launcher copies to a terminal. Colours and
//! progress bars still work, and the launcher can keep the last lines.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{OptionalActions, Winsize, tcgetattr, tcgetwinsize, tcsetattr, tcsetwinsize};

/// Opens a pseudo-terminal. Returns the launcher's end and the worker's. The terminal is raw: it passes bytes
/// from the worker unchanged.
pub(super) fn open() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let ours = openpt(flags)?;
    grantpt(&ours)?;
    unlockpt(&ours)?;
    let theirs = ioctl_tiocgptpeer(&ours, flags)?;
    let mut modes = tcgetattr(&theirs)?;
    modes.make_raw();
    tcsetattr(&theirs, OptionalActions::Now, &modes)?;
    sync_size(&ours, &mut None);
    Ok((ours, theirs))
}

/// Resizes a worker's pseudo-terminal to the size of the console. `last` is the size set before, and is
/// updated.
pub(super) fn sync_size(ours: &impl AsFd, last: &mut Option<Winsize>) {
    let Ok(size) = tcgetwinsize(io::stderr()) else { return };
    let same = |last: &Winsize| (last.ws_row, last.ws_col) == (size.ws_row, size.ws_col);
    if !last.as_ref().is_some_and(same) && tcsetwinsize(ours, size).is_ok() {
        *last = Some(size);
    }
}
