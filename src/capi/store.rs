//! Store servers, at which the ranks of groups meet.

#![allow(unsafe_code)]

use std::ffi::c_char;
use std::net::{SocketAddr, ToSocketAddrs};

use convoke_comm::CommError;
use convoke_store::StoreServer;

use crate::pointers::{check_place, free, invalid, put_handle, text};
use crate::status::{Status, run, run_or};

/// A store server with the protocol of torch's TCPStore. It runs in a thread of this process.
#[derive(Debug)]
pub struct Store {
    port: u16,
    _server: StoreServer,
}

/// Starts a store server at an address of this host; `NULL` means every address. Port 0 means a free one.
/// Free the handle with `cvk_store_free`.
///
/// # Safety
/// `host` is `NULL` or ends with a byte 0; `store` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_store_serve(host: *const c_char, port: u16, store: *mut *mut Store) -> Status {
    run(|| {
        check_place(store, "store")?;
        // SAFETY: the caller promises it.
        let host = unsafe { text(host, "host") }?.unwrap_or("::");
        let refused =
            |what: String| CommError::InvalidArgument(format!("cannot serve a store at {host}: {what}"));
        let addresses = (host, port).to_socket_addrs().map_err(|error| refused(error.to_string()))?;
        let addresses: Vec<SocketAddr> = addresses.collect();
        let server = StoreServer::bind(&addresses).map_err(|error| invalid(error.to_string()))?;
        let made = Store { port: server.port(), _server: server };
        // SAFETY: the caller promises it.
        unsafe { put_handle(store, made, "store") }?;
        Ok(Status::Ok)
    })
}

/// Returns the port of the server; 0 for a handle that is `NULL`.
///
/// # Safety
/// `store` is valid or `NULL`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_store_port(store: *const Store) -> u16 {
    // SAFETY: the caller promises it.
    unsafe { store.as_ref() }.map_or(0, |store| store.port)
}

/// Ends the server; `NULL` is allowed. Groups that formed at it go on, but cannot be shrunk.
///
/// # Safety
/// `store` is `NULL` or valid, and not used from now on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_store_free(store: *mut Store) {
    // SAFETY: the caller promises it.
    run_or((), || unsafe { free(store) });
}
