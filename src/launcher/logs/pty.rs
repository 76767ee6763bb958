//! Provides a pseudo-terminal for a stderr that the launcher copies to a terminal. Colours and progress bars
//! still work, and the launcher can keep the last lines.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{OptionalActions, Winsize, tcgetattr, tcgetwinsize, tcsetattr, tcsetwinsize};

/// Our end and the worker's. What is written there comes here byte for byte.
///
/// # Errors
/// The system has no pseudo-terminal to give (no /dev/pts, too many).
pub(super) fn open() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let ours = openpt(flags)?;
    grantpt(&ours)?;
    unlockpt(&ours)?;
    let theirs = ioctl_tiocgptpeer(&ours, flags)?;
    let mut modes = tcgetattr(&theirs)?;
    modes.make_raw();
    tcsetattr(&theirs, OptionalActions::Now, &modes)?;
    follow(&ours, &mut None);
    Ok((ours, theirs))
}

/// Gives a worker's terminal the size of the console; `last` is what it has.
pub(super) fn follow(ours: &impl AsFd, last: &mut Option<Winsize>) {
    let Ok(size) = tcgetwinsize(io::stderr()) else { return };
    let same = |last: &Winsize| (last.ws_row, last.ws_col) == (size.ws_row, size.ws_col);
    if !last.as_ref().is_some_and(same) && tcsetwinsize(ours, size).is_ok() {
        *last = Some(size);
    }
}
